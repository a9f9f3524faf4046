"""The base of all exceptions, here because this folder imports nothing from its parent."""


class FlashSkipError(RuntimeError):
    """Anything that flashskip raises on its own account, besides wrong arguments."""
