"""Three hosts of this machine, made of network namespaces, with a Ray cluster by `ray up` on them."""
