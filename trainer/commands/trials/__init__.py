"""What `compare`, `sweep`, `prove` and `plan measured=here` share: trials in fresh processes, and one way to report."""
