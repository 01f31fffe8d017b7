"""Several coordinators over one fleet of engine replicas, each with its own groups."""
