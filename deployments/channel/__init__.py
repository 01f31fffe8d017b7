"""Long-lived lines between the coordinator and its engine replicas: chunks, their ends, and reports."""
