"""Writes the package as a zip for executors: `python scripts/package.py dist/sparktorch.zip`.

Beside each module lies its bytecode, which Python cannot keep for what it imports from a zip: each Python worker would
compile the package again. A Python of another version passes it over.
"""

import py_compile
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def write(path: Path) -> None:
    """Writes the zip, and the folder that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, tempfile.TemporaryDirectory() as folder:
        for file in sorted((ROOT / "sparktorch").rglob("*.py")):
            name = file.relative_to(ROOT)
            # By its hash, unchecked: a zip keeps times in other units than bytecode does.
            code = py_compile.compile(
                str(file),
                cfile=f"{folder}/code",
                dfile=str(name),
                doraise=True,
                invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
            )
            archive.write(file, name)
            archive.write(str(code), name.with_suffix(".pyc"))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
