"""Fetching a checkpoint's tensors and settings from the Hugging Face hub; never anything that runs code when it is opened."""
from __future__ import annotations

from pathlib import Path

from .errors import TdlmError


def fetch_checkpoint(name: str, complaint: type[TdlmError]) -> Path:
    """The local folder of owner/model. Every failure is one line of the caller's kind of error."""
    if name.startswith((".", "/", "~")) or name.count("/") != 1 or name.endswith(".safetensors"):
        raise complaint(f"no checkpoint {name}; give a .safetensors file, a folder, or an owner/model of the Hugging Face hub")
    try:
        import huggingface_hub
    except ImportError:
        raise complaint(f"{name} is no file here; to fetch it from the Hugging Face hub: pip install 'tdlm[hf]'") from None
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:  # the hub's client raises whatever its transport raises
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise complaint(f"{name} could not be fetched from the Hugging Face hub ({reason}); check the name and the network, or "
                        "give a local folder") from None
