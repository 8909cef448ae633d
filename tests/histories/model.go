package main

import (
	"fmt"

	"github.com/anishathalye/porcupine"
)

// The model of one lock: a lease with fencing tokens, whose time to live does not end during the
// test.
//
// An acquire whose outcome is unknown may set the lock at any later time, until its undo arrives or a
// repetition with its idempotency key is granted. Until then it is a ghost: a holder whose fencing
// token nobody knows. Other proposals are not in the model, see decided.

// state is what the lock's masters agree on at one moment.
type state struct {
	// holder is the owner of the grant, or empty.
	holder string
	// fencing is the fencing token of the grant, or 0 for a ghost.
	fencing int64
	// last is the largest fencing token that a client was given.
	last int64
}

type kind int

const (
	acquire kind = iota
	extend
	release
	get
	// A ghost begins and ends at any time after the request.
	ghostBegins
	ghostEnds
)

// request is what a client asked for. An owner is one request, or all requests with one idempotency
// key.
type request struct {
	kind  kind
	lock  string
	owner string
}

// outcome is the answer to an operation.
type outcome int

const (
	// granted: 201, or 200 for an extension.
	granted outcome = iota
	// released: 204.
	released
	// held: 409 lock_held, or `GET` with a holder.
	held
	// refused: 409 lock_held, perhaps because of another request's proposal.
	refused
	// notHeld: 404, 409 not_holder, or a `GET` that shows a free lock.
	notHeld
	// unknown: 503, or no answer.
	unknown
)

type answer struct {
	outcome outcome
	fencing int64
}

func step(before, input, output any) (bool, any) {
	now, asked, got := before.(state), input.(request), output.(answer)
	isOwn := now.holder == asked.owner
	isGhost := now.holder != "" && now.fencing == 0
	switch asked.kind {
	case acquire:
		if got.outcome == held {
			return now.holder != "" && !isOwn, now
		}
		if got.outcome == refused {
			return !isOwn || isGhost, now
		}
		if isOwn && now.fencing == got.fencing {
			return true, now
		}
		mayGrant := now.holder == "" || isOwn && isGhost
		after := state{holder: asked.owner, fencing: got.fencing, last: got.fencing}
		return mayGrant && got.fencing > now.last, after
	case extend:
		if got.outcome == granted {
			return isOwn && now.fencing == got.fencing, now
		}
		return !isOwn, now
	case release:
		// A 204 promises that no majority stores the grant any more.
		if got.outcome != notHeld {
			if isOwn {
				now = state{last: now.last}
			}
			return true, now
		}
		return !isOwn, now
	case get:
		if got.outcome == held {
			return now.fencing == got.fencing && now.holder != "" || isGhost, now
		}
		return now.holder == "" || isGhost, now
	case ghostBegins:
		if now.holder == "" {
			now.holder = asked.owner
		}
		return true, now
	case ghostEnds:
		if isOwn && isGhost {
			now.holder = ""
		}
		return true, now
	}
	panic(fmt.Sprintf("kind %d", asked.kind))
}

func model() porcupine.Model {
	return porcupine.Model{
		Init: func() any { return state{} },
		Step: step,
		DescribeOperation: func(input, output any) string {
			asked, got := input.(request), output.(answer)
			names := []string{"acquire", "extend", "release", "get", "ghost begins", "ghost ends"}
			outcomes := []string{"granted", "released", "held", "refused", "not held", "unknown"}
			return fmt.Sprintf("%s by %s: %s %d",
				names[asked.kind], asked.owner, outcomes[got.outcome], got.fencing)
		},
		DescribeState: func(now any) string { return fmt.Sprintf("%+v", now) },
	}
}
