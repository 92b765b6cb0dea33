import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Future;
import java.util.concurrent.ScheduledThreadPoolExecutor;
import java.util.concurrent.TimeUnit;

/**
 * The JDK's ScheduledThreadPoolExecutor with one thread: a binary heap under a lock.
 *
 * <p>It removes on cancel, because without that policy cancelled tasks pile up until they are due.
 */
final class ExecutorPeer extends Peer {
    private static final Runnable NOTHING = () -> {};

    private ScheduledThreadPoolExecutor executor;

    @Override
    void open() {
        executor = new ScheduledThreadPoolExecutor(1);
        executor.setRemoveOnCancelPolicy(true);
    }

    @Override
    Object schedule(int delayMs) {
        return executor.schedule(NOTHING, delayMs, TimeUnit.MILLISECONDS);
    }

    @Override
    void cancel(Object handle) {
        ((Future<?>) handle).cancel(false);
    }

    /** The only thread is held by a first task until all the others are due. */
    @Override
    long expire(int[] delaysMs) throws Exception {
        open();
        Fired fired = new Fired(delaysMs.length);
        CountDownLatch hold = new CountDownLatch(1);
        executor.submit(() -> {
            hold.await();
            return null;
        });
        for (int delayMs : delaysMs) {
            executor.schedule(fired::add, delayMs, TimeUnit.MILLISECONDS);
        }
        Thread.sleep(EXPIRE_MS + 50);
        long started = System.nanoTime();
        hold.countDown();
        fired.await();
        long elapsed = System.nanoTime() - started;
        close();
        return elapsed;
    }

    @Override
    void close() {
        executor.shutdownNow();
    }

    public static void main(String[] arguments) throws Exception {
        new ExecutorPeer().run(arguments);
    }
}
