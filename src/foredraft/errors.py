"""Every error that a user can act on.

Each message says what was wrong, where, and what to do. The command line prints the message alone and exits 2;
the server answers with a 4xx. Anything that is not a `ForedraftError` is a bug of ours.
"""


class ForedraftError(Exception):
    """Base of all errors that a user can cause and mend."""


class ConfigError(ForedraftError):
    """A flag, field or configuration value is wrong; the message names the flag."""


class ModelError(ForedraftError):
    """A model's files are missing, unreadable, of an unknown architecture, or do not fit their configuration."""


class DrafterError(ForedraftError):
    """A drafter does not fit its target: another vocabulary, a wrong shape, a missing tensor."""


class RequestError(ForedraftError):
    """One request is wrong: its prompt does not fit the context, or a parameter is out of range."""


class ContextLengthError(RequestError):
    """A prompt, or a prompt and its output, do not fit the context."""


class OutOfBlocksError(ForedraftError):
    """A single request needs more KV cache than the whole pool holds."""


class NumericalError(ForedraftError):
    """A target's logits are not numbers (NaN); only the request that they belong to fails."""


class EngineStoppedError(ForedraftError):
    """The engine is shutting down, or was never started."""
