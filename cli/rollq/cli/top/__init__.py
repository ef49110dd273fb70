"""`rollq top`: shows the status of a run live, and pauses, resumes and drains by keyboard."""
