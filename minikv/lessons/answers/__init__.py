"""Solutions and known wrong answers, out of a learner's first sight."""
