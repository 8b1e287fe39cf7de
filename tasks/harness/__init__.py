"""What tasks and instruments are written against. Knows neither of them by name."""
