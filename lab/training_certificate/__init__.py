"""The certificate of learning: the same training, whatever the rollout does."""
