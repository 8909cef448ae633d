package redlock_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	redlock "github.com/redlock-gateway/redlock-gateway/openapi/clients/go"
)

func TestTwoOfThreeGuardsHoldTwoSlots(t *testing.T) {
	t.Parallel()
	s := start(t)
	client := s.client()
	pool := redlock.Slots(2)
	first := lock(t, client, "pool", pool, kept, redlock.Owner("first"))
	second := lock(t, client, "pool", pool, kept, redlock.Owner("second"))
	slots := slices.Concat(first.SlotsHeld(), second.SlotsHeld())
	slices.Sort(slots)
	if !slices.Equal(slots, []int{1, 2}) {
		t.Fatal(slots)
	}
	extended(t, first, 2)
	extended(t, second, 2)

	_, err := client.Lock(background, "pool", pool)
	var held *redlock.HeldError
	if !errors.As(err, &held) || len(held.Holders) != 2 {
		t.Fatal(err)
	}
	var owners []string
	for at, holder := range held.Holders {
		owners = append(owners, holder.Holder)
		if holder.Slot != at+1 || holder.ExpiresIn <= 0 || holder.AcquiredAt.IsZero() {
			t.Error(holder)
		}
	}
	slices.Sort(owners)
	if !slices.Equal(owners, []string{"first", "second"}) {
		t.Error(owners)
	}
	status := decided(t, client, "pool")
	if status.Slots != 2 || len(status.Holders) != 2 || status.Holders[1].FencingToken == 0 {
		t.Errorf("%+v", status)
	}

	waiting := make(chan struct{}, 9)
	third := make(chan *redlock.Guard, 1)
	go func() {
		defer close(third)
		guard, err := client.Lock(background, "pool", pool, redlock.Wait(patience),
			redlock.OnWaiting(func(redlock.Waiting) { waiting <- struct{}{} }))
		if err != nil {
			t.Error(err)
			return
		}
		third <- guard
	}()
	<-waiting
	must(t, second.Release(background))
	guard := <-third
	if !slices.Equal(guard.SlotsHeld(), second.SlotsHeld()) {
		t.Error(guard.SlotsHeld(), second.SlotsHeld())
	}
	must(t, guard.Release(background))
	must(t, first.Release(background))
}

func TestAGuardTakesTwoSlotsOrNone(t *testing.T) {
	t.Parallel()
	s := start(t)
	client := s.client()
	pool, both := redlock.Slots(2), redlock.Take(2)
	one := lock(t, client, "pool", pool)
	if _, err := client.Lock(background, "pool", pool, both); !errors.As(err, new(*redlock.HeldError)) {
		t.Fatal(err)
	}
	must(t, one.Release(background))
	guard := lock(t, client, "pool", pool, both, kept)
	if !slices.Equal(guard.SlotsHeld(), []int{1, 2}) {
		t.Fatal(guard.SlotsHeld())
	}
	extended(t, guard, 1)
	must(t, client.ForceReleaseSlot(background, "pool", 2))
	closed(t, "the loss", guard.Lost())
	if loss := lossOf(t, guard.Check()); loss.Reason != redlock.Gone {
		t.Error(loss)
	}
	must(t, guard.Release(background))
	if status := decided(t, client, "pool"); status.State != "free" {
		t.Errorf("%+v", status)
	}
	if guard := lock(t, client, "single"); guard.SlotsHeld() != nil {
		t.Error(guard.SlotsHeld())
	}

	var refused *redlock.RefusedError
	for _, options := range [][]redlock.Option{{redlock.Slots(0)}, {redlock.Slots(257)}, {pool, redlock.Take(3)}, {both}} {
		if _, err := client.Lock(background, "pool", options...); !errors.As(err, &refused) || refused.Status != 400 {
			t.Error(err)
		}
	}
}

func TestUnansweredAcquireLeavesNoSlot(t *testing.T) {
	t.Parallel()
	s := start(t)
	for _, options := range [][]redlock.Option{{redlock.Slots(3)}, {redlock.Slots(3), redlock.Take(2)}} {
		s.do("swallow", map[string]int{"count": 1})
		s.do("refuse", map[string]int{"status": 403})
		_, err := s.client(s.Proxy).Lock(background, "pool", append(options, redlock.TTL(time.Minute))...)
		if !errors.As(err, new(*redlock.RefusedError)) {
			t.Fatal(err)
		}
		s.do("refuse", map[string]int{"status": 0})
		eventually(t, "all slots are free", func() bool {
			status := decided(t, s.client(), "pool")
			return status.State == "free" && len(status.Holders) == 0
		})
	}
}
