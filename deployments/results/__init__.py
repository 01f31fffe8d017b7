"""Parts of a result: columns of numbers, and a text that is decoded on first use."""
