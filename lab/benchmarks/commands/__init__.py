"""Commands of `tailrace bench`. `bench` has the group and the short commands; each longer one has a module."""
