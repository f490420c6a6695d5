"""What several tasks use: estimators that choose their settings, rows held out, statistics of columns, layers."""
