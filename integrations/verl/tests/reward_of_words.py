"""A reward for verl's trainer: the number of different words of an answer."""


def compute_score(data_source, solution_str, ground_truth, **_) -> float:
    return float(len(set(solution_str.split())))
