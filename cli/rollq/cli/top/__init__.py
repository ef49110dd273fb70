"""`rollq top`: shows a run's status live, and pauses, resumes and drains by keyboard."""
