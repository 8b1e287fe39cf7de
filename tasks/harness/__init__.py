"""The interface of tasks and instruments. It knows neither of them by name."""
