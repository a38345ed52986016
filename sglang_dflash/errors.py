"""Errors that a user can mend."""


class DFlashError(ValueError):
    """Something that was asked for cannot be done; the message is one sentence for the user.

    A ValueError, so that SGLang answers a refused request with status 400.
    """
