"""A folder for each kind of task. The rest of the package imports none of them; `sparktorch/__init__` names them."""
