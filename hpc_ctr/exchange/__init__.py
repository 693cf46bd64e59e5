"""Which rank owns, holds and needs a row, and how rows travel."""
