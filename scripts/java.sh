#!/usr/bin/env bash
# Makes sure there is a Java >= 17: installs it where this may be done, otherwise says what to install.
set -euo pipefail

java=${JAVA_HOME:+$JAVA_HOME/bin/}java

major() {
  "$java" -version 2>&1 | sed -nE 's/.* version "([0-9]+).*/\1/p' | head -n 1
}

if command -v "$java" >/dev/null && [ "$(major)" -ge 17 ]; then
  exit 0
fi
if command -v apt-get >/dev/null && [ "$(id -u)" -eq 0 ]; then
  echo "installing openjdk-17-jre-headless"
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq openjdk-17-jre-headless >/dev/null
  exit 0
fi
cat >&2 <<MESSAGE
Spark 4 needs Java 17 or newer; found: $(command -v "$java" >/dev/null && "$java" -version 2>&1 | head -n 1 || echo none).
Install one and run this again:
  Debian, Ubuntu   sudo apt-get install openjdk-17-jre-headless
  Fedora, RHEL     sudo dnf install java-17-openjdk-headless
  macOS            brew install openjdk@17
or point JAVA_HOME at one.
MESSAGE
exit 1
