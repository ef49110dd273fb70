"""The objective of a batch: the policy loss, its metrics, logprobs and teachers. Needs torch."""
