"""What the verbs of the command line do: one file each, composing the folders of the package."""
