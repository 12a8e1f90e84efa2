"""The one exception every path raises when it cannot honour a request."""


class Unsupported(ValueError):
    """A kernel or scheme cannot honour an argument; the message names both.

    Raised before anything is launched. `subject` is the kernel, scheme or derived form that
    refuses, `reason` says which argument it cannot honour and why.
    """

    def __init__(self, subject: str, reason: str):
        super().__init__(f"{subject}: {reason}")
        self.subject = subject
        self.reason = reason
