package redlock

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/redlock-gateway/redlock-gateway/openapi/clients/go/api"
)

const (
	// For requests that no lease waits for.
	oneLook  = 2 * time.Second
	allLooks = 5 * time.Second
)

// LockStatus is a lock as a majority of the masters sees it, for people: it may be outdated on
// arrival. It never has the token. What is unknown is the zero value.
type LockStatus struct {
	// Name is the lock's name.
	Name string
	// State is "held" by a majority; "free": nobody can have one; or "unknown": too few masters
	// answered.
	State string
	// Owner is the holder's label, and Metadata its metadata.
	Owner    string
	Metadata map[string]string
	// FencingToken is 0 if another Redlock client holds the lock.
	FencingToken int64
	// AcquiredAt is when the lock was acquired, by the wall clock of that gateway.
	AcquiredAt time.Time
	// ExpiresIn is when the lock ends unless it is extended.
	ExpiresIn time.Duration
	// Key is the name of the API key that acquired the lock.
	Key string
	// Slots is how many may hold the lock at once, the largest number that a holder asked for; 0 if
	// none asked for slots. Holders then has the holder of each slot that is held. The fields of the
	// holder above are those of the first one.
	Slots   int
	Holders []SlotHolder
	// UnknownSlots are the slots that may be held: too few masters answered, or their answers differ.
	UnknownSlots []int
	// Slot is the slot that an entry of a list is about, if it is another one than slot 1.
	Slot int
	// Nodes has the state of each master; nil in lists.
	Nodes map[string]string
	// Waiters is the line at this gateway, the next one first; 100 at most, and none in lists.
	Waiters []Waiter
	// WaitersTotal is how many wait at this gateway.
	WaitersTotal int
}

// Waiter is a request that waits for a lock.
type Waiter struct {
	// Owner is its label.
	Owner string `json:"owner"`
	// WaitingSince is when it joined the line, by the gateway's wall clock.
	WaitingSince time.Time `json:"waiting_since"`
	// IsAway says that it is between two requests of one wait.
	IsAway bool `json:"is_away"`
}

// LockList is a page of held locks.
type LockList struct {
	// Locks are in no particular order.
	Locks []LockStatus
	// NextCursor is for [ListOptions.Cursor] of the next page; empty at the end.
	NextCursor string
}

// ListOptions choose the locks of a page. The zero value is for the first locks of all.
type ListOptions struct {
	// Prefix is the beginning of the names.
	Prefix string
	// Limit is how many locks a page has at most, 1 to 1000; 0 is 100.
	Limit int
	// Cursor is the NextCursor of the page before.
	Cursor string
}

// Status returns the state of a lock on the masters. The error is a [*RefusedError], an
// [*UnavailableError], a [*SetupError], or that of ctx.
func (c *Client) Status(ctx context.Context, name string) (*LockStatus, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	var status LockStatus
	err := c.look(ctx, name, func(ctx context.Context, gateway *api.Client) (*http.Response, error) {
		return gateway.GetLock(ctx, name, nil)
	}, func(body []byte) error {
		return json.Unmarshal(body, &status)
	})
	if err != nil {
		return nil, err
	}
	return &status, nil
}

// List returns a page of held locks. The errors are those of [Client.Status].
func (c *Client) List(ctx context.Context, options ListOptions) (*LockList, error) {
	params := api.ListLocksParams{}
	if options.Prefix != "" {
		params.Prefix = &options.Prefix
	}
	if options.Limit != 0 {
		params.Limit = number(options.Limit)
	}
	if options.Cursor != "" {
		params.Cursor = &options.Cursor
	}
	var page struct {
		Locks      []LockStatus `json:"locks"`
		NextCursor string       `json:"next_cursor"`
	}
	err := c.look(ctx, "", func(ctx context.Context, gateway *api.Client) (*http.Response, error) {
		return gateway.ListLocks(ctx, &params)
	}, func(body []byte) error {
		return json.Unmarshal(body, &page)
	})
	if err != nil {
		return nil, err
	}
	return &LockList{Locks: page.Locks, NextCursor: page.NextCursor}, nil
}

// ForceRelease takes a lock from its holder, whose guard reports the loss at its next extension. The
// errors are those of [Client.Status]; a [*RefusedError] with status 404 if nobody holds the lock. Of
// a lock with [Slots] it takes slot 1.
func (c *Client) ForceRelease(ctx context.Context, name string) error {
	return c.forceRelease(ctx, name, nil)
}

// ForceReleaseSlot is [Client.ForceRelease] for one slot of a lock with [Slots], from 1. A holder of
// several slots loses the lock with any of them.
func (c *Client) ForceReleaseSlot(ctx context.Context, name string, slot int) error {
	return c.forceRelease(ctx, name, number(slot))
}

func (c *Client) forceRelease(ctx context.Context, name string, slot *int32) error {
	if err := checkName(name); err != nil {
		return err
	}
	return c.look(ctx, name, func(ctx context.Context, gateway *api.Client) (*http.Response, error) {
		return gateway.ReleaseLock(ctx, name, &api.ReleaseLockParams{Force: pointerTo(true), Slot: slot})
	}, nil)
}

func (c *Client) look(
	ctx context.Context, name string,
	send func(ctx context.Context, gateway *api.Client) (*http.Response, error), read func(body []byte) error,
) error {
	_, err := c.ask(ctx, question{
		name: name, send: send, read: read, until: now().add(allLooks), oneTry: oneLook, hope: now(),
	})
	return err
}

// UnmarshalJSON reads the answer of a gateway.
func (s *LockStatus) UnmarshalJSON(body []byte) error {
	var answer struct {
		Name         string            `json:"name"`
		State        string            `json:"state"`
		Owner        string            `json:"owner"`
		Metadata     map[string]string `json:"metadata"`
		FencingToken int64             `json:"fencing_token"`
		AcquiredAt   time.Time         `json:"acquired_at"`
		ExpiresInMs  int64             `json:"expires_in_ms"`
		Key          string            `json:"key"`
		Slots        int               `json:"slots"`
		Holders      []api.SlotHolder  `json:"holders"`
		UnknownSlots []int             `json:"unknown_slots"`
		Slot         int               `json:"slot"`
		Nodes        []api.NodeAnswer  `json:"nodes"`
		Waiters      []Waiter          `json:"waiters"`
		WaitersTotal int               `json:"waiters_total"`
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		return err
	}
	if answer.Name == "" || answer.State == "" {
		return errors.New("a lock's status was expected")
	}
	*s = LockStatus{
		Name: answer.Name, State: answer.State, Owner: answer.Owner, Metadata: answer.Metadata,
		FencingToken: answer.FencingToken, AcquiredAt: answer.AcquiredAt, ExpiresIn: milliseconds(answer.ExpiresInMs),
		Key: answer.Key, Slots: answer.Slots, Holders: slotHolders(answer.Holders), Slot: answer.Slot,
		UnknownSlots: answer.UnknownSlots,
		Waiters:      answer.Waiters, WaitersTotal: max(answer.WaitersTotal, len(answer.Waiters)),
	}
	for _, node := range answer.Nodes {
		if s.Nodes == nil {
			s.Nodes = make(map[string]string)
		}
		s.Nodes[node.Node] = string(node.State)
	}
	return nil
}
