"""Parts that tasks which train a model share: their axes, the model and one step."""
