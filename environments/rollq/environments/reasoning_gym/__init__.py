"""Tasks of the package reasoning-gym: generators of questions, whose graders run in sealed processes."""
