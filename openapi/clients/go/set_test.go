package redlock_test

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	redlock "github.com/redlock-gateway/redlock-gateway/openapi/clients/go"
	"github.com/redlock-gateway/redlock-gateway/openapi/clients/go/api"
)

var names = []string{"env/staging", "env/production"}

func lockSet(t *testing.T, client *redlock.Client, options ...redlock.Option) *redlock.Guard {
	t.Helper()
	guard, err := client.LockSet(background, names, options...)
	must(t, err)
	return guard
}

func (s *servers) allFree() bool {
	return !slices.ContainsFunc(names, func(name string) bool { return s.look(0, name).State != api.LockStateFree })
}

func TestASetExcludesEachOfItsLocksAndTheReverse(t *testing.T) {
	t.Parallel()
	s := start(t)
	client := s.client()
	guard := lockSet(t, client, redlock.Owner("deploy"))
	if !slices.Equal(guard.Names(), names) || guard.Name() != "env/staging, env/production" {
		t.Error(guard.Names(), guard.Name())
	}
	var held *redlock.HeldError
	for _, name := range names {
		if _, err := client.Lock(background, name); !errors.As(err, &held) || held.Holder != "deploy" {
			t.Error(err)
		}
		if status := s.look(0, name); *status.FencingToken != guard.FencingToken() {
			t.Error(status)
		}
	}
	must(t, guard.Release(background))
	must(t, guard.Release(background))
	if !s.allFree() {
		t.Error("a lock of the set is still held")
	}

	single := lock(t, client, names[1], redlock.Owner("alone"))
	_, err := client.LockSet(background, names)
	if !errors.As(err, &held) || len(held.Held) != 1 || held.Held[0].Name != names[1] || held.Held[0].Holder != "alone" {
		t.Fatal(err)
	}
	if state := s.look(0, names[0]).State; state != api.LockStateFree {
		t.Error(state)
	}
	got := make(chan *redlock.Guard)
	go func() {
		guard, err := client.LockSet(background, names, redlock.Wait(patience))
		if err != nil {
			t.Error(err)
		}
		got <- guard
	}()
	time.Sleep(100 * time.Millisecond)
	must(t, single.Release(background))
	if guard := <-got; guard != nil {
		must(t, guard.Release(background))
	}
}

func TestASetIsHeldForFiveTimesItsTTL(t *testing.T) {
	t.Parallel()
	s := start(t)
	proxy := s.count(0)
	guard := lockSet(t, s.client(proxy.URL), redlock.TTL(ttl))
	for begin := guard.Deadline(); guard.Deadline()-begin < 5*ttl; {
		extended(t, guard, 1)
		for _, name := range names {
			if status := s.look(0, name); status.FencingToken == nil || *status.FencingToken != guard.FencingToken() {
				t.Fatalf("%s is held by %+v", name, status)
			}
		}
	}
	if waiters, isKnown := guard.Waiters(); !isKnown || waiters != 0 {
		t.Error(waiters, isKnown)
	}
	if single := proxy.single.Load(); single != 0 {
		t.Errorf("%d requests extended one lock", single)
	}
	must(t, guard.Release(background))
}

func TestASetIsLostWithAnyOfItsLocks(t *testing.T) {
	t.Parallel()
	s := start(t)
	client := s.client()
	for _, taken := range names {
		err := client.WithLockSet(background, names, func(ctx context.Context, guard *redlock.Guard) error {
			must(t, client.ForceRelease(background, taken))
			closed(t, "the loss", guard.Lost())
			closed(t, "the context", ctx.Done())
			return nil
		}, kept)
		if loss := lossOf(t, err); loss.Reason != redlock.Gone || loss.Name != taken {
			t.Error(loss)
		}
		eventually(t, "the other lock is free", s.allFree)
	}
}

func TestTheDeadlineOfASetMovesWhenAllLocksAreExtended(t *testing.T) {
	t.Parallel()
	s := start(t)
	proxy := s.count(0)
	guard := lockSet(t, s.client(proxy.URL), kept)
	text := func(text string) *string { return &text }
	for _, status := range []int32{http.StatusServiceUnavailable, http.StatusForbidden} {
		proxy.first.Store(&api.ExtendResult{Status: status, Code: text("c"), Detail: text("ask again")})
		eventually(t, "a failed extension", func() bool { return proxy.first.Load() == nil })
		extended(t, guard, 1)
	}
	// From here on, one of the two locks is never extended.
	refusal := &api.ExtendResult{Status: http.StatusServiceUnavailable, Code: text("c"), Detail: text("ask again")}
	eventually(t, "the loss", func() bool {
		proxy.first.Store(refusal)
		return guard.Check() != nil
	})
	loss := lossOf(t, guard.Check())
	if loss.Reason != redlock.Unconfirmed || loss.Name != guard.Name() || !strings.Contains(loss.Detail, names[0]) {
		t.Error(loss)
	}
	must(t, guard.Release(background))
}

func TestASetIsReleasedAlsoWhenNobodyAnswered(t *testing.T) {
	t.Parallel()
	s := start(t)
	client := s.client(s.Proxy)
	s.do("swallow", map[string]int{"count": 1})
	guard := lockSet(t, client)
	s.do("swallow", map[string]int{"count": 1})
	must(t, guard.Release(background))
	if !s.allFree() {
		t.Error("a lock of the set is still held")
	}
	s.do("swallow", map[string]int{"count": 1})
	s.do("refuse", map[string]int{"status": 403})
	if _, err := client.LockSet(background, names, redlock.TTL(time.Minute)); !errors.As(err, new(*redlock.RefusedError)) {
		t.Fatal(err)
	}
	eventually(t, "all locks are free", s.allFree)
}

func TestASetRefusesWhatOnlyASingleLockHas(t *testing.T) {
	t.Parallel()
	s := start(t)
	client := s.client()
	for _, option := range []redlock.Option{redlock.Queue(redlock.QueueAll), redlock.Slots(2), redlock.Take(1)} {
		_, err := client.LockSet(background, names, option)
		if !errors.As(err, new(*redlock.SetupError)) || !strings.Contains(err.Error(), "single lock") {
			t.Error(err)
		}
	}
	for _, wrong := range [][]string{nil, {"a", "a"}, {"a", ""}} {
		if _, err := client.LockSet(background, wrong); !errors.As(err, new(*redlock.RefusedError)) {
			t.Error(err)
		}
	}
}

func TestTheGeneratedClientCreatesARequestAndClaimsItsSet(t *testing.T) {
	t.Parallel()
	s := start(t)
	plain, key := s.plain(0), "go-request-number-1"
	created, err := plain.CreateRequestWithResponse(background,
		&api.CreateRequestParams{IdempotencyKey: key}, api.DeferBody{Names: names})
	must(t, err)
	request := created.JSON202
	if request == nil || request.State != "ready" || !slices.Equal(request.Names, names) {
		t.Fatal(created.Status(), string(created.Body))
	}
	claimed, err := plain.AcquireLocksWithResponse(background,
		&api.AcquireLocksParams{IdempotencyKey: &key}, api.AcquireSetBody{Names: names})
	must(t, err)
	if claimed.JSON201 == nil {
		t.Fatal(claimed.Status(), string(claimed.Body))
	}
	now, err := plain.GetRequestWithResponse(background, request.ID)
	must(t, err)
	if now.JSON200 == nil || now.JSON200.State != "claimed" {
		t.Error(now.Status(), string(now.Body))
	}
}
