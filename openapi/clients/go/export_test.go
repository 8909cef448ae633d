package redlock

import "time"

// Deadline returns the deadline on the clock of the guard.
func (g *Guard) Deadline() time.Duration {
	_, deadline := g.lease()
	return time.Duration(deadline)
}

// UntilDeadline returns the time to the deadline, also for a lost guard; negative after it.
func (g *Guard) UntilDeadline() time.Duration {
	_, deadline := g.lease()
	return deadline.since(now())
}

// NewTransport makes the transport of a client without an HTTPClient.
var NewTransport = newTransport
