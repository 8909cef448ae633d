package redlock_test

import (
	"context"
	"database/sql"
	"errors"
	"log"
	"time"

	redlock "github.com/redlock-gateway/redlock-gateway/openapi/clients/go"
)

// The fencing token keeps out a former holder that has not noticed its loss.
func ExampleClient_WithLock() {
	var db *sql.DB
	client, err := redlock.New(redlock.Config{URLs: []string{"http://gateway-1:8080", "http://gateway-2:8080"}, Key: "rlk.…"})
	if err != nil {
		log.Fatal(err)
	}
	err = client.WithLock(context.Background(), "reports/nightly", func(ctx context.Context, guard *redlock.Guard) error {
		result, err := db.ExecContext(ctx,
			"UPDATE reports SET body = $1, fence = $2 WHERE id = $3 AND fence <= $2", "…", guard.FencingToken(), 7)
		if err != nil {
			return err
		}
		if rows, err := result.RowsAffected(); err != nil || rows == 0 {
			return errors.Join(errors.New("a later holder has written"), err)
		}
		return nil
	}, redlock.TTL(30*time.Second), redlock.Wait(time.Minute))
	var held *redlock.HeldError
	var lost *redlock.LostError
	switch {
	case errors.As(err, &held):
		log.Printf("%s works on it", held.Holder)
	case errors.As(err, &lost):
		log.Printf("stopped, because it was lost: %s", lost.Reason)
	case err != nil:
		log.Fatal(err)
	}
}

func ExampleClient_Lock() {
	ctx := context.Background()
	client, err := redlock.New(redlock.Config{URLs: []string{"http://127.0.0.1:8080"}})
	if err != nil {
		log.Fatal(err)
	}
	guard, err := client.Lock(ctx, "reports/nightly", redlock.Owner("host-7"))
	if err != nil {
		log.Fatal(err)
	}
	defer guard.Release(ctx)
	for range 10 {
		select {
		case <-guard.Lost():
			log.Fatal(guard.Check())
		case <-time.After(time.Second): // A piece of work.
		}
	}
}

// A pool of four runners. The number of a runner is that of its slot.
func ExampleSlots() {
	ctx := context.Background()
	client, err := redlock.New(redlock.Config{URLs: []string{"http://127.0.0.1:8080"}})
	if err != nil {
		log.Fatal(err)
	}
	err = client.WithLock(ctx, "runners", func(ctx context.Context, guard *redlock.Guard) error {
		log.Printf("runner %d of 4", guard.SlotsHeld()[0])
		return nil // Work here, with ctx.
	}, redlock.Slots(4), redlock.Wait(time.Minute))
	if err != nil {
		log.Fatal(err)
	}
}

func ExampleClient_WithLockSet() {
	ctx := context.Background()
	client, err := redlock.New(redlock.Config{URLs: []string{"http://127.0.0.1:8080"}})
	if err != nil {
		log.Fatal(err)
	}
	names := []string{"env/staging", "env/production"}
	err = client.WithLockSet(ctx, names, func(ctx context.Context, guard *redlock.Guard) error {
		return nil // Work here, with ctx.
	}, redlock.Wait(time.Minute))
	var held *redlock.HeldError
	if errors.As(err, &held) && len(held.Held) > 0 {
		log.Printf("%s is held by %s", held.Held[0].Name, held.Held[0].Holder)
	}
}
