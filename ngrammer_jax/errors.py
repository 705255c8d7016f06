"""The one exception that means: the input is wrong, and here is how to mend it."""


class BadInput(ValueError):
  """What was given cannot work. The message names it, what was expected and the fix.

  The verbs print the message alone and exit with status 2: retrying the same
  command cannot help.
  """
