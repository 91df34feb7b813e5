"""Training: the loop, its checkpoints and metrics, and what a run will cost.

`from tdlm.train.loop import train` does a run, `from tdlm.train.plan import plan` predicts one,
`from tdlm.train.checkpoint import latest, load_model` reads one.
"""
