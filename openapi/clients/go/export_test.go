package redlock

import "time"

// Deadline is on the clock of the guard.
func (g *Guard) Deadline() time.Duration {
	_, deadline := g.lease()
	return time.Duration(deadline)
}

// UntilDeadline is also told of a lost guard; negative when it has passed.
func (g *Guard) UntilDeadline() time.Duration {
	_, deadline := g.lease()
	return deadline.since(now())
}

// NewTransport is what a client uses that was given none.
var NewTransport = newTransport
