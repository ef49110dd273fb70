"""Experiment trackers: TensorBoard, Weights & Biases, MLflow. Nothing that they do stops or slows a training run."""
