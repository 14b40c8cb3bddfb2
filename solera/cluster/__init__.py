"""Ray: where the ranks of a learner run if they are not plain processes. Needs the extra `cluster`."""
