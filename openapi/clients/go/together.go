package redlock

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/redlock-gateway/redlock-gateway/openapi/clients/go/api"
)

const (
	// Limit of a gateway on the leases of one request. With the longest names that is about 350 kB.
	maxLeases = 1000
	// The part of the interval between two renewals by which a lease may be renewed early.
	early = 4
	// The part of the time left that a joint request may take. In the rest, each guard asks alone.
	shareOfAll = 2
)

// together renews the leases of one client: one PATCH /locks extends all that are due at about the
// same time.
//
// Each guard registers its lease and waits until it is due. When the first lease is due, its guard
// extends the leases that are due soon with it. Each guard still watches its own deadline. A lease that the
// joint request did not decide is extended by its guard alone. A set has a request of its own, which
// its guard sends.
type together struct {
	mutex   sync.Mutex
	waiting map[*renewal]struct{}
	// A gateway has answered that it does not know PATCH /locks.
	isUnknown bool
}

// renewal is a lease that waits for its next extension.
type renewal struct {
	guard *Guard
	// Ends with the guard.
	ctx      context.Context
	interval time.Duration
	due      moment
	giveUp   moment
	// Gets true if a joint request has decided the lease, and false if the guard has to ask alone.
	decided chan bool
}

// wait waits until the lease is due, and renews it together with others. It returns false if the
// guard has to ask alone.
func (t *together) wait(r *renewal) bool {
	t.enter(r)
	defer t.leave(r)
	for !r.due.hasPassed() {
		select {
		case isDecided := <-r.decided:
			return isDecided
		case <-r.ctx.Done():
			return false
		case <-time.After(min(r.due.left(), piece)):
		}
	}
	switch taken := t.take(r); len(taken) {
	case 0: // The request of another guard has the lease.
	case 1:
		return false
	default:
		// The request outlives a release of this guard, because other guards wait for it too.
		go r.guard.client.extendMany(taken)
	}
	select {
	case isDecided := <-r.decided:
		return isDecided
	case <-r.ctx.Done():
		return false
	}
}

func (t *together) enter(r *renewal) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if t.waiting == nil {
		t.waiting = make(map[*renewal]struct{})
	}
	t.waiting[r] = struct{}{}
}

func (t *together) leave(r *renewal) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	delete(t.waiting, r)
}

// take takes a lease out, with the others to renew together with it. It returns none if another
// request has taken the lease.
func (t *together) take(first *renewal) []*renewal {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if _, isWaiting := t.waiting[first]; !isWaiting {
		return nil
	}
	taken := []*renewal{first}
	if !t.isUnknown {
		soon := now()
		for other := range t.waiting {
			if other != first && other.guard.ttl == first.guard.ttl && other.due <= soon.add(other.interval/early) {
				taken = append(taken, other)
			}
		}
		others := taken[1:]
		slices.SortFunc(others, func(a, b *renewal) int { return cmp.Compare(a.due, b.due) })
		taken = taken[:min(len(taken), maxLeases)]
	}
	for _, each := range taken {
		delete(t.waiting, each)
	}
	return taken
}

func (t *together) forget() {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	t.isUnknown = true
}

// extendMany extends leases by one request, which is repeated for those that are not decided.
func (c *Client) extendMany(leases []*renewal) {
	giveUp := slices.MinFunc(leases, func(a, b *renewal) int { return cmp.Compare(a.giveUp, b.giveUp) }).giveUp
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func(all []*renewal) {
		for _, each := range all {
			select {
			case <-each.ctx.Done():
			case <-ctx.Done():
				return
			}
		}
		// All guards were released or lost.
		cancel()
	}(leases)
	left, ttl := giveUp.left(), leases[0].guard.ttl
	var sent moment
	var asked []*renewal
	_, err := c.ask(ctx, question{
		send: func(ctx context.Context, gateway *api.Client) (*http.Response, error) {
			asked = nil
			body := api.ExtendManyBody{TTLMs: count(ttl)}
			for _, each := range leases {
				if each.ctx.Err() == nil {
					asked = append(asked, each)
					body.Leases = append(body.Leases, api.LeaseRef{Name: each.guard.name, Token: each.guard.token})
				}
			}
			if len(asked) == 0 {
				return nil, context.Canceled
			}
			sent = now()
			return gateway.ExtendLocks(ctx, body)
		},
		read: func(body []byte) error {
			var answer api.ExtendManyResults
			if err := json.Unmarshal(body, &answer); err != nil {
				return err
			}
			if len(answer.Results) != len(asked) {
				return fmt.Errorf("it has %d results for %d leases", len(answer.Results), len(asked))
			}
			var unknown *Problem
			leases = nil
			for at, each := range asked {
				if problem := each.read(answer.Results[at], sent); problem != nil {
					leases = append(leases, each)
					if unknown == nil || problem.RetryAfter > unknown.RetryAfter {
						unknown = problem
					}
				}
			}
			if unknown != nil {
				return &someUndecided{problem: unknown}
			}
			return nil
		},
		until:  now().add(left / shareOfAll),
		oneTry: limitOfATry(left),
	})
	var refused *RefusedError
	if errors.As(err, &refused) && (refused.Status == http.StatusNotFound || refused.Status == http.StatusMethodNotAllowed) {
		c.together.forget()
	}
	for _, each := range leases {
		each.decided <- false
	}
}

// read applies the result for one lease. It returns the problem if the lease has to be sent again.
func (r *renewal) read(result api.ExtendResult, sent moment) *Problem {
	problem := problemOf(result)
	isDecided := false
	switch {
	case result.Name != r.guard.name:
	case problem.Status == http.StatusOK && result.ValidityMs != nil:
		validity, deadline := validity(*result.ValidityMs, result.ElapsedMs, sent, r.guard.ttl)
		isDecided = r.guard.extended(validity, deadline, result.Waiters)
	case problem.isLoss():
		r.guard.lose(problem.asLoss(r.guard.name))
		isDecided = true
	case problem.mayPass() || problem.Status == http.StatusInternalServerError:
		r.guard.hear(problem.String())
		return &problem
	}
	r.decided <- isDecided
	return nil
}

// problemOf returns what a result says of a lease that was not extended.
func problemOf(result api.ExtendResult) Problem {
	return Problem{
		Status:     int(result.Status),
		Code:       valueOf(result.Code),
		Detail:     valueOf(result.Detail),
		Holder:     valueOf(result.Holder),
		RetryAfter: milliseconds(valueOf(result.RetryAfterMs)),
	}
}

// someUndecided reports that a request about several locks has failed for some of them. The problem
// counts as the answer to the request.
type someUndecided struct {
	// The lock that the problem is about; empty if the request is about the locks of several guards.
	name    string
	problem *Problem
}

func (u *someUndecided) Error() string {
	return u.problem.String()
}
