"""Programs that run other people's code, each in an environment of its own: they import nothing of ours."""
