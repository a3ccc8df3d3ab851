"""The open-vocabulary query service and its page."""
