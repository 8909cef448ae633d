package redlock

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/redlock-gateway/redlock-gateway/openapi/clients/go/api"
)

// target is what a guard holds: one lock, or a set of locks. It sends the requests about it and
// reads their answers.
type target interface {
	// names returns the names of the locks.
	names() []string
	acquire(ctx context.Context, gateway *api.Client, key string, body api.AcquireBody) (*http.Response, error)
	extend(ctx context.Context, gateway *api.Client, token string, ttl time.Duration) (*http.Response, error)
	// readExtended returns a function that reads the answer to extend: a lease for each lock.
	readExtended(leases *[]api.Lease) func(body []byte) error
	// release sends the token, or the key of an acquire whose answer never arrived.
	release(ctx context.Context, gateway *api.Client, token, key *string) (*http.Response, error)
	// readReleased returns a function that reads the answer to release; nil if the answer has no body.
	readReleased() func(body []byte) error
}

// label names a target in errors and logs. No name has a comma.
func label(t target) string {
	return strings.Join(t.names(), ", ")
}

// single is one lock. A release by key needs the slots that the acquire asked for.
type single struct {
	name        string
	slots, take *int32
}

func (s single) names() []string {
	return []string{s.name}
}

func (s single) acquire(ctx context.Context, gateway *api.Client, key string, body api.AcquireBody) (*http.Response, error) {
	return gateway.AcquireLock(ctx, s.name, &api.AcquireLockParams{IdempotencyKey: &key}, body)
}

func (s single) extend(ctx context.Context, gateway *api.Client, token string, ttl time.Duration) (*http.Response, error) {
	return gateway.ExtendLock(ctx, s.name, &api.ExtendLockParams{LockToken: token}, api.ExtendBody{TTLMs: count(ttl)})
}

func (s single) readExtended(leases *[]api.Lease) func(body []byte) error {
	*leases = make([]api.Lease, 1)
	return readLease(&(*leases)[0])
}

func (s single) release(ctx context.Context, gateway *api.Client, token, key *string) (*http.Response, error) {
	params := api.ReleaseLockParams{LockToken: token, IdempotencyKey: key}
	if key != nil {
		params.Slots, params.Take = s.slots, s.take
	}
	return gateway.ReleaseLock(ctx, s.name, &params)
}

func (s single) readReleased() func(body []byte) error {
	return nil
}

// set is a set of locks with one token.
type set []string

func (s set) names() []string {
	return s
}

func (s set) acquire(ctx context.Context, gateway *api.Client, key string, body api.AcquireBody) (*http.Response, error) {
	return gateway.AcquireLocks(ctx, &api.AcquireLocksParams{IdempotencyKey: &key}, api.AcquireSetBody{
		Names: s, TTLMs: body.TTLMs, WaitMs: body.WaitMs, Priority: body.Priority,
		HoldAtLeastMs: body.HoldAtLeastMs, Owner: body.Owner, Metadata: body.Metadata,
	})
}

func (s set) extend(ctx context.Context, gateway *api.Client, token string, ttl time.Duration) (*http.Response, error) {
	body := api.ExtendManyBody{TTLMs: count(ttl)}
	for _, name := range s {
		body.Leases = append(body.Leases, api.LeaseRef{Name: name, Token: token})
	}
	return gateway.ExtendLocks(ctx, body)
}

// readExtended returns a function that fails unless all locks were extended. A lost lock counts more
// than a lock that may be extended later.
func (s set) readExtended(leases *[]api.Lease) func(body []byte) error {
	return func(body []byte) error {
		var answer api.ExtendManyResults
		if err := json.Unmarshal(body, &answer); err != nil {
			return err
		}
		if len(answer.Results) != len(s) {
			return fmt.Errorf("it has %d results for %d locks", len(answer.Results), len(s))
		}
		*leases = nil
		var failed *someUndecided
		for at, result := range answer.Results {
			problem := problemOf(result)
			switch {
			case result.Name != s[at]:
				return fmt.Errorf("it has a result for %q instead of %q", result.Name, s[at])
			case problem.isLoss():
				return &someUndecided{result.Name, &problem}
			case problem.Status != http.StatusOK:
				if failed == nil || problem.RetryAfter > failed.problem.RetryAfter {
					failed = &someUndecided{result.Name, &problem}
				}
			case result.ValidityMs == nil:
				return errors.New("it has a result without validity")
			default:
				*leases = append(*leases, api.Lease{
					ValidityMs: *result.ValidityMs, ElapsedMs: result.ElapsedMs, Waiters: result.Waiters,
				})
			}
		}
		if failed != nil {
			return failed
		}
		return nil
	}
}

func (s set) release(ctx context.Context, gateway *api.Client, token, key *string) (*http.Response, error) {
	return gateway.ReleaseLocks(ctx, &api.ReleaseLocksParams{Name: s, LockToken: token, IdempotencyKey: key})
}

// readReleased returns a function that fails unless all locks were released, or were not held.
func (s set) readReleased() func(body []byte) error {
	return func(body []byte) error {
		var answer api.ReleaseSetResults
		if err := json.Unmarshal(body, &answer); err != nil {
			return err
		}
		if len(answer.Results) != len(s) {
			return fmt.Errorf("it has %d results for %d locks", len(answer.Results), len(s))
		}
		for _, result := range answer.Results {
			problem := Problem{
				Status: int(result.Status), Code: valueOf(result.Code), Detail: valueOf(result.Detail),
				RetryAfter: milliseconds(valueOf(result.RetryAfterMs)),
			}
			if problem.Status != http.StatusNoContent && !problem.isLoss() {
				return &someUndecided{result.Name, &problem}
			}
		}
		return nil
	}
}

// validityOfAll returns the validity and the deadline of the lease that ends first, and how many
// wait for all locks together.
func validityOfAll(leases []api.Lease, sent moment, ttl time.Duration) (time.Duration, moment, *int64) {
	var first time.Duration
	var end moment
	var waiters *int64
	for at, lease := range leases {
		trusted, deadline := validity(lease.ValidityMs, lease.ElapsedMs, sent, ttl)
		if at == 0 || deadline < end {
			first, end = trusted, deadline
		}
		if lease.Waiters != nil {
			waiters = pointerTo(valueOf(waiters) + *lease.Waiters)
		}
	}
	return first, end, waiters
}
