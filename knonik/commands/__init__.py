"""The subcommands of `knonik`, a module each: HELP, add_arguments, run, text. Nothing heavy at import."""
