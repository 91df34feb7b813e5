"""`python -m tdlm` is the command line."""
from .cli import main

main()
