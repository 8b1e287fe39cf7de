"""What tasks that train a model share: their axes, the model and one step."""
