"""What is judged of collective calls in one way, whatever the source: recordings, dumps, console logs.

* `table`: the calls of all ranks side by side.
* `agree`: which of several ways a call was made is the one that was meant.
* `order`: who came to a call by another order than before.
"""
