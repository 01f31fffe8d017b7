"""TRL's doors to the service: trainers of TRL 1.16 whose samples Tailrace generates. Extra `train`."""
