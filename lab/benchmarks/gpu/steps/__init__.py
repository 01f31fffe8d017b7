"""The steps of `make gpu-check`. Each runs in a process of its own, in a dry run in one for all."""
