"""How good a model is: bounds with error bars, and the simple models they stand beside."""
