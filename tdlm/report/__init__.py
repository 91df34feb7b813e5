"""A run as one self-contained HTML page: `write_report`."""
from __future__ import annotations

from .html import write_report

__all__ = ["write_report"]
