"""Runs as self-contained HTML pages: `write_report` about one or several, `compare_runs` for many side by side."""
from __future__ import annotations

from .html import write_report
from .together import compare_runs

__all__ = ["compare_runs", "write_report"]
