"""The one exception type that means: the user can correct this."""


class UserError(ValueError):
    """Input that its author can correct.

    The message names the file, line or field, the value met, and what would be right. The command
    line prints it as one paragraph and exits with status 2; any other exception is a bug and keeps
    its traceback.
    """
