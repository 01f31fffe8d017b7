"""`make gpu-pack`: packages that a bare machine with a GPU lacks, small enough to be carried there by hand."""
