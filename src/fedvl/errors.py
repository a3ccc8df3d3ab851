"""The one kind of error that a user is meant to read."""


class FedVLError(Exception):
    """Something the user can mend: one sentence that says what is wrong and what to do."""
