"""COMPOSES: configuration, the Serve application, the client, the command line and the benchmarks."""
