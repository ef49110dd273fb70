"""Experiment trackers: TensorBoard, Weights & Biases, MLflow. They never stop or slow a training run."""
